"""``kafka://host:port[,host:port]/topic-prefix?option=value``: the records of each job in a Kafka topic of its own.

* **Atomic, durable**: a `put` is one transaction, with ``acks=all``; when it returns, as many replicas have it as the
  topic's ``min.insync.replicas`` says.
* **Owned**: a worker of a job has a transactional id. Who opens the job as the same worker takes it over; the brokers
  refuse what a former owner still sends. Several workers may share a job.
* **Found out**: a commit whose answer was lost is looked up in the log.
* **Exact**: a key's records are in one partition, by a hash that is part of the format. What is longer than a message
  may be is cut into pieces.
* **Bounded**: what a checkpoint covers is written down as such, and the log is deleted up to the first record that is
  still needed. A message that needs its records for long has them carried forward.
* **Read to the end**: recovery reads to an end that is asked for before, and fails if it is not reached.

Partition 0 of the topic holds the events of the job and the decisions about it, the others its records.

Modules: ``settings`` the URL; ``frames``, ``view`` and ``control`` what a log holds and adds up to, without I/O;
``cluster``, ``reader`` and ``writer`` the brokers; ``log`` and ``job`` a topic as it is read, and as its owner uses it;
``heartbeat``, ``inspector``, ``store``.
"""

from dalsegno.stores.kafka.settings import Settings
from dalsegno.stores.kafka.store import KafkaStore

__all__ = ["KafkaStore", "Settings"]
