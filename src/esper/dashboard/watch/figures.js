// Numbers as text, written as `esper.text_table` writes them.

// A number of any size: whole numbers with all their digits, others with `decimals` decimals, fewer from 10 on, none from 1,000 on, and two
// significant digits if they are too small for that. `sign` "+" writes a plus.
export function figure(value, decimals = 4, sign = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  const before = value < 0 ? "-" : sign;
  if (size === Infinity) return `${before}inf`;
  if (size >= 1000 || Number.isInteger(size)) return before + Math.round(size).toLocaleString("en");
  if (size < 10 ** (1 - decimals)) {
    const [digits, power] = size.toExponential(1).split("e-");
    return before + (size < 1e-4 ? `${Number(digits)}e-${power.padStart(2, "0")}` : String(Number(size.toPrecision(2))));
  }
  return before + size.toFixed(Math.max(decimals + 1 - String(Math.floor(size)).length, 0));
}

// A number with the ends of its interval, if it has one; `isShort`: as ± half its width.
export function withInterval(value, low, high, { sign = "", isShort = false } = {}) {
  if ([value, low, high].some((end) => end === null || end === undefined)) return figure(value, 4, sign);
  return `${figure(value, 4, sign)} ${isShort ? `±${figure((high - low) / 2)}` : `[${figure(low, 4, sign)}, ${figure(high, 4, sign)}]`}`;
}

// A difference of shares, such as accuracies, in percentage points.
export function points(difference, low = null, high = null) {
  const reach = low === null || high === null ? "" : ` ±${(50 * (high - low)).toFixed(2)}`;
  return `${difference < 0 ? "-" : "+"}${(100 * Math.abs(difference)).toFixed(2)}${reach} points`;
}

export function percent(share, decimals = 0) {
  return `${(100 * share).toFixed(decimals)}%`;
}

// A number for an axis.
export function compact(value) {
  const size = Math.abs(value);
  const [unit, letter] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([least]) => size >= Math.max(least, 1e4)) ?? [1, ""];
  return size !== 0 && size < 1e-4 ? value.toExponential(1) : `${Number((value / unit).toPrecision(4))}${letter}`;
}

// A long name without its beginning; the end tells it from others.
export function shortened(name, most) {
  return name.length > most ? `…${name.slice(name.length - most + 1)}` : name;
}
