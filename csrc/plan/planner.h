// What the executors ask of a plan: its templates, and what its work costs.
#pragma once

#include "plan/costs.h"
#include "plan/templates.h"
