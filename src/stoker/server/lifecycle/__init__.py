"""Starts, supervises and stops the server process and its engine, and plans and guards their memory."""
