"""The `stoker` command: one small file per command. Heavy imports happen inside the commands."""
