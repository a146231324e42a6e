"""The client library, for asyncio and for threads. Applications import it by `from waltzd import Client`."""
