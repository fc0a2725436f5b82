"""How connections over gRPC notice that the other side is gone, and that a port is taken."""

SERVER = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
)
# Of a client that waits on one long call, and calls again as soon as it breaks.
WAITING_CLIENT = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # what a connection may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
