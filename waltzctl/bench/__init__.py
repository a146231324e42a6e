"""`waltzctl bench`: what a cluster does under load, as figures that say how they came about."""
