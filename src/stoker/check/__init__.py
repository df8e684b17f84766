"""What a faster format costs in quality: the same items on one server or two, with honest error bars. No torch.

Items come from seeded generators in suites/; docs/check.md says what each suite asks and which formulas are used.
"""
