"""`python -m rollcall` is the `rollcall` command."""

from rollcall.cli.main import main

if __name__ == "__main__":
    main()
