"""Tiers that ship with tierstore: a kind of place each, found by name through the registry."""

if __name__ != "tierstore.backends":
    # From the repository's root the folder can also be imported as `backends`: that would be a
    # second copy, whose classes are not the registered ones and whose errors nobody catches.
    raise ImportError(
        f"this package is tierstore.backends, not {__name__}: use `import tierstore.backends`"
    )
