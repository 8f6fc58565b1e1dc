"""What drives an agent outside a stream engine: sources, sinks and the local runner."""
