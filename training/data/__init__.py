"""Training text: generators (seeded, standard library only) and collectors of public text. No tensors here."""
