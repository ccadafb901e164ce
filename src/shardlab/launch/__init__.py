"""How ranks come to be: started here, or by torchrun, Slurm, MPI or Ray."""
