// What the recent past says: common prefixes, who breaks them, what more memory would buy.

import { showPrefixes } from "./prefixes.js";

export function startFindings() {}

export function showFindings(findings, now) {
  showPrefixes(findings.prefixes, now);
}
