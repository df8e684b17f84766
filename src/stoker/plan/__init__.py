"""Does it fit, how fast, says who: boxes, models, memory, roofline, evidence, picker. No torch anywhere below."""
