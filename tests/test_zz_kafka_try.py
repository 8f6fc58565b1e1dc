import os
from hashlib import blake2b
from pathlib import Path
from dalsegno.stores.base import TaskActionStore
from dalsegno.stores.kafka import KafkaStore
from dalsegno.testing.stores import StoreSuite
SERVERS=os.environ["DALSEGNO_TEST_KAFKA"]
RUN=os.urandom(4).hex()
class TestKafkaStore(StoreSuite):
    takes_over = True
    shared = True
    def make(self, place: Path) -> TaskActionStore:
        return KafkaStore(f"kafka://{SERVERS}/{RUN}{blake2b(str(place).encode(),digest_size=8).hexdigest()}?partitions=4")
    async def displace(self, place, job):
        s=self.make(place); await s.open(job,"another"); await s.close()
