"""Starting, supervising and ending: the process, its engine, the memory it plans and guards."""
