trap 0
ecflow_client --complete
