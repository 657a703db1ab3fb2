"""Plant many bugs in one build: each function's body becomes a choice between the original and its mutants.

DENORMD_MUTANT, an environment variable, names the mutant that a process runs.
"""

import re

# Comments, strings and character literals: braces in them do not count. A lifetime is not a character literal.
SKIPPED = re.compile(
    r"""//[^\n]*|/\*.*?\*/|b?r(?P<hashes>\#*)".*?"(?P=hashes)|b?"(?:\\.|[^"\\])*"|b?'(?:\\.[^']*|[^'\\])'""", re.DOTALL
)
FUNCTION = re.compile(r"\b(?P<const>const\s+)?(?:async\s+)?(?:unsafe\s+)?fn\s+\w+[^(]*")
SWITCH = """{{ static PLANTED: std::sync::LazyLock<bool> = std::sync::LazyLock::new(|| \
std::env::var("DENORMD_MUTANT").is_ok_and(|name| name == "{name}")); *PLANTED }}"""
PAIRS = {"(": ")", "{": "}"}


def blank(text):
    """The text with spaces for its comments and strings, each line where it was."""
    return SKIPPED.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)


def bodies(text):
    """The range of each function's body, without its braces; a body within another one is left out. Left out, too, are
    bodies that cannot be a choice: of constant functions, and of those that return `impl Trait`, because each branch
    would have its own type."""
    plain, at, found = blank(text), 0, []
    while header := FUNCTION.search(plain, at):
        parameters = closed(plain, header.end())
        begin = re.compile(r"[{;]").search(plain, parameters)
        at = begin.end() if begin else len(plain)
        if not begin or begin.group() == ";":
            continue
        end = closed(plain, begin.start())
        if not header.group("const") and not re.search(r"\bimpl\b", plain[parameters:begin.start()]):
            found.append((begin.end(), end))
        at = end
    return found


def closed(plain, at):
    """The place of the bracket that closes the one at `at`."""
    opening, closing, depth = plain[at], PAIRS[plain[at]], 0
    for bracket in re.compile(f"[{opening}{closing}]").finditer(plain, at):
        depth += 1 if bracket.group() == opening else -1
        if depth == 0:
            return bracket.start()
    raise ValueError("a bracket is not closed")


def places(text, mutants):
    """The body that each mutant changes, by its name; mutants outside a body have none."""
    ranges = bodies(text)
    found = {}
    for mutant in mutants:
        begin = text.index(mutant["old"])
        end = begin + len(mutant["old"])
        within = [body for body in ranges if body[0] <= begin and end <= body[1]]
        found.update({mutant["name"]: body for body in within})
    return found


def planted(text, mutants):
    """The text with all these mutants, each in its body, and the lines that each takes, counted from one, by its name."""
    by_body = {}
    for name, body in places(text, mutants).items():
        by_body.setdefault(body, []).append(name)
    of = {mutant["name"]: mutant for mutant in mutants}
    out, lines, at = "", {}, 0
    for (begin, end), names in sorted(by_body.items()):
        out += text[at:begin]
        for name in names:
            body = text[begin:end].replace(of[name]["old"], of[name]["new"])
            first = out.count("\n") + 2
            out += f"\n if {SWITCH.format(name=name)} {{{body}}} else "
            lines[name] = range(first, out.count("\n") + 2)
        out += f"{{{text[begin:end]}}}"
        at = end
    return out + text[at:], lines
