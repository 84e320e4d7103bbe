"""Formats that are constraints. Dates and times are patterns of ours, since the automaton library takes 29 February of
any year and a leap second at any time; it holds the others itself.

Sources: RFC 3339, section 5.6 and appendix C (years divisible by 4, of the centuries those divisible by 400). Two
things are left out that RFC 3339 allows and readers of JSON refuse: the year 0000, and a leap second in an offset
other than zero."""

from __future__ import annotations

from collections.abc import Mapping

DAY = r"(0[1-9]|1\d|2[0-8])"  # of every month
MONTHS = rf"((0[1-9]|1[0-2])-{DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
YEAR = r"(000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
LEAP_YEAR = r"(\d\d(0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26]|0[48])00)"
DATE = rf"({YEAR}-{MONTHS}|{LEAP_YEAR}-02-29)"
HOUR = r"([01]\d|2[0-3])"
TIME = rf"({HOUR}:[0-5]\d:[0-5]\d(\.\d+)?([zZ]|[+-]{HOUR}:[0-5]\d)|23:59:60(\.\d+)?([zZ]|[+-]00:00))"
PATTERNS: Mapping[str, str] = {"date": f"^{DATE}$", "time": f"^{TIME}$", "date-time": f"^{DATE}[tT]{TIME}$"}
NATIVE = frozenset(("duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))  # held by llguidance
FORMATS = frozenset((*NATIVE, *PATTERNS))  # any other is an annotation
# of these no two have a string in common
APART = frozenset(("date-time", "time", "date", "duration", "email", "ipv4", "ipv6", "uuid"))
