"""One file per endpoint family: a request in, JSON or a stream of events out."""
