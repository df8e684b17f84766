"""Results for people: HTML pages, terminal tables, Markdown and CSV of what `bench` and `plan` found. No torch.

Python chooses words and computes the geometry of charts; all markup is in templates/, where values are escaped.
"""
