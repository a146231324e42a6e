"""One owned partition: the shell around recovery, its session, its replicas, copying."""
