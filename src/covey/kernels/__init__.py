"""The same numbers, faster: C++ on a CPU, Triton and FlexAttention on a GPU."""
