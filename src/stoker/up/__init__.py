"""`stoker up`: a recipe becomes a running, checked service. Nothing here imports torch; engines are processes."""
