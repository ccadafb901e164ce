"""Pipeline parallelism: each rank runs some of the layers."""
