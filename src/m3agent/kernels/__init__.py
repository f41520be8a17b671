"""The hot operators, one file each: the plain torch meaning is the definition, faster code stands beside it.

Nothing here knows of models, sessions or pages' owners; tensors in, tensors out.
"""
