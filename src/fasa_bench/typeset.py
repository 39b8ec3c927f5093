"""Text for Markdown and LaTeX: signs escaped, cells aligned."""

from __future__ import annotations

from collections.abc import Sequence

TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "↓": r"$\downarrow$"}
TEX |= {"<": "$<$", ">": "$>$", "↑": r"$\uparrow$", "–": "--", "·": r"$\cdot$", "≈": r"$\approx$", "≤": r"$\le$"}
TEX |= {"≥": r"$\ge$", "−": "$-$", "†": r"\textdagger{}", **{sign: f"\\{sign}" for sign in "&%$#_{}"}}
# of a tabular that may be wider than the page: as wide as it is, or else as the line
FITTED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"


def tex(text: str) -> str:
    return "--" if text == "-" else "".join(TEX.get(sign, sign) for sign in text)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """align: l or r for each column."""
    aligned = [":--" if side == "l" else "--:" for side in align]
    lines = [header, aligned, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def booktabs(
    header: Sequence[str],
    groups: Sequence[Sequence[Sequence[str]]],
    align: str,
    caption: str,
    notes: Sequence[str] = (),
) -> str:
    """A float that is never wider than the page. groups: rows that belong together."""
    body: list[str] = []
    for index, group in enumerate(groups):
        if index and max(map(len, groups)) > 1:
            body.append(r"\addlinespace[2pt]")
        body += [" & ".join(map(tex, row)) + r" \\" for row in group]
    lines = [
        r"\begin{table*}[tp]",
        r"\centering\scriptsize\setlength{\tabcolsep}{3pt}",
        rf"\caption{{{tex(caption)}}}\smallskip",
        FITTED,
        rf"\begin{{tabular}}{{{align}}}",
        r"\toprule",
        " & ".join(map(tex, header)) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}}",
    ]
    if notes:
        lines += [r"\par\smallskip\raggedright", *(tex(note) + r"\par" for note in notes)]
    return "\n".join([*lines, r"\end{table*}", ""])
