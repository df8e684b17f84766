"""How tokens are chosen: a request's settings, the exact sampler and grammar masks. Target and drafters share them."""
