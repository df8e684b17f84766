"""What requests may say. Types are checked here, values where they are used, with sentences about them.

Fields that no endpoint knows are ignored, as the APIs' own servers do; known ones that would change the answer and are
not supported are refused by name.
"""
