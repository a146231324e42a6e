"""The Spark data source and exports. They need the `spark` extra; no daemon imports this package."""
