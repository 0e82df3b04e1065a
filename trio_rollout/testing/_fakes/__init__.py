"""Stand-ins for inference servers: FakeSGLang on a real socket, FakeServers without I/O."""
