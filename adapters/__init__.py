"""Training frameworks whose optimizer state tierstore takes over."""

if __name__ != "tierstore.adapters":
    # From the repository's root the folder can also be imported as `adapters`: that would be a
    # second copy, whose classes are not those that everybody else uses.
    raise ImportError(
        f"this package is tierstore.adapters, not {__name__}: use `import tierstore.adapters`"
    )
