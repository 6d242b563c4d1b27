// What the recent past says: common prefixes, who breaks them, what more memory would buy.

import { showBreakers } from "./breakers.js";
import { showCurve, startCurve } from "./curve.js";
import { showPrefixes } from "./prefixes.js";

export function startFindings() {
  startCurve();
}

export function showFindings(findings, now) {
  showBreakers(findings.breakers, now);
  showCurve(findings.curve);
  showPrefixes(findings.prefixes, now);
}
