"""Links between processes: ZeroMQ sockets with a handshake, credit windows and authentication."""
