# SPDX-License-Identifier: Apache-2.0
"""Discovery: which streams there are, what they are called, and who grants leases on them. Advice, no authority.

directory   soft state from announces, and what a query finds in it, without IO     config      every setting
rates       how many requests a client may make, without IO                         responses   where answers go
provider    the agent that listens and answers, inside a driver or for a fleet      registry    it as one object
"""
