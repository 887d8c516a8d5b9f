"""The version of the four packages, which pyproject.toml takes from here.

What is written down beside weights (exports, fingerprints of calibrations) names it. The metadata of an installed
package would not do: there is none if the sources are on the path, and it may be that of another version.
"""

VERSION = "0.1.0"
