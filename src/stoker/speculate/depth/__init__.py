"""How many drafts a step verifies: the controller, what it knows of cost, and how far confidence can be trusted."""
