"""All-reduce + residual add + RMSNorm in one launch, without multicast. See README.md beside this file."""
