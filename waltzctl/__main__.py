"""`python -m waltzctl` is `waltzctl`."""

from waltzctl.main import main

if __name__ == "__main__":
    main()
