"""Links between machines: frames, handshake, streams."""
