"""Pre-training of a Llama-style decoder with AdaHOP: `python -m train.lm`."""
