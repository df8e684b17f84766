"""How the embedded model was made: data, tokenizer, trunk, MTP head, DFlash drafter, evaluation, export.

Nothing of the product imports this folder.
"""
