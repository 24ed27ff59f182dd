"""Which memory can be lent to whom: whole pages, on as many GPUs as the borrower's blocks lie on. No I/O."""


def misfit(*, lender: tuple[int, int], borrower: tuple[int, int]) -> str:
    """Why pages of the one cannot hold blocks of the other, as words about the lender; "": they can.

    Args: each: (GPUs or other ranks, bytes of a page on one of them; 0: not known, and fits).
    """
    ranks, page_bytes = lender
    wanted_ranks, wanted_bytes = borrower
    if ranks != wanted_ranks:
        return f"its pages lie on {_ranks(ranks)}, the borrower's blocks on {_ranks(wanted_ranks)}"
    if page_bytes and page_bytes < wanted_bytes:
        return f"its pages of {page_bytes} bytes are smaller than the borrower's of {wanted_bytes}"
    return ""


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"
