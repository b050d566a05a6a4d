"""What a call of a tuned kernel does: read its key, look its configuration up once, run."""
