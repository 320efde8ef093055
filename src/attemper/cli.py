"""The command `attemper`: parse, call, print."""


def main() -> None:
    """Entry point."""
