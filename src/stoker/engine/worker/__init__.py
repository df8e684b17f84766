"""The engine in a process or thread of its own: messages, the loop that serves them, and the client's side."""
