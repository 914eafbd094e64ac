"""Argument checks shared by the package."""


def require_at_least(minimum: int, **values: int) -> None:
    """Raise ValueError naming the first value that is below `minimum`."""
    for name, value in values.items():
        if value < minimum:
            raise ValueError(f"{name} must be >= {minimum}, got {value}")
