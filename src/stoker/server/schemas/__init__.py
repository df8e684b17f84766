"""Request bodies as pydantic models. Types are validated here, values where they are used.

Unknown fields are ignored, as the APIs' own servers do. Known fields that would change the answer and are not supported
are refused by name.
"""
