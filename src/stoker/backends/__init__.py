"""Networks and the devices they run on: `cpu` is the reference and the demo, `gpu` the product."""
