"""What applications use: asyncio and blocking. `from waltzd import Client` is the door."""
