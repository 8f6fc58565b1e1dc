"""The core: identity, codec, journal, executor, group commit. It does no I/O and owns no clock."""
