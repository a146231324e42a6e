"""The log on cheap storage: stores of objects, the manifest that proves an archive, and what is uploaded next."""
