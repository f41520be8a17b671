"""How m3-nano was made: scenes and conversations from seeds, the training model, optimiser, loop and export.

One command, `python -m training.run`, does all of it on one GPU; docs/training.md walks through it.
Training may use everything in `m3agent`; nothing in `m3agent` knows of training.
"""
