"""Waltz: a distributed write-ahead log. This package is the library that applications, tools and daemons share."""
