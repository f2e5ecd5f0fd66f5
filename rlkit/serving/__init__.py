"""Between trainer and replicas: the proxy (routing, adapters, counters), and the replicas it talks to."""
